"""A package of its own: installed packages of this name would hide a folder without this file."""
