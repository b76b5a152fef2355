"""How the tasks of a build are run: what they are, where their outputs lie, who runs them, what is left.

See README.md of this folder for the rooms.
"""
