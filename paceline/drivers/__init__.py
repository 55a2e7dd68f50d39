"""Drivers: orderings of the same verbs.

    prompts --draws--> collect --groups--> learn --version--> publish --> evaluate
               ^                                                  |
               '------------------- next step --------------------'

`collect` waits for the engine and the rewards, `learn` for the trainer, `publish` for every engine
to acknowledge, `evaluate` for the engine (or for nothing, with an engine of its own). A driver
orders these and nothing else: no `try`, no backend, no mode flags. What has to be undone on the
way out is owned by the `Disposer` that the run was built in.
"""
