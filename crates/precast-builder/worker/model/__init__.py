"""The model of the project: its entry, what submodules declare, their inputs and states."""
