"""How samples are read: gathered from memory maps, decoded one by one, or mixed."""
