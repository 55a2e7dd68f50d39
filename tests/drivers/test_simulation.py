"""The driver of several clocks under thousands of seeded schedules; see simulation.py.

A failing seed prints its settings and the end of its schedule. Alone it is run by

    python -m pytest tests/drivers/test_simulation.py -k alone --seed-alone 1234
"""
