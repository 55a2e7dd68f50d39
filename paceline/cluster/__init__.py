"""Worker processes, where they stand, and the trainers and servers that are made of them."""
