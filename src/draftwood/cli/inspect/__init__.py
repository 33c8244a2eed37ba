"""draftwood inspect."""
