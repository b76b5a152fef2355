"""From texts to token ids, and from token ids to rows of one length."""
