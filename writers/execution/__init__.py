"""Runs the tasks of a build: tasks and stages, the work folder with their outputs, engines, and progress.

See README.md of this folder for its modules.
"""
