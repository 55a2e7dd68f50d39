"""What a vLLM server runs of Paceline's; this folder is on its PYTHONPATH, and nothing else is."""
