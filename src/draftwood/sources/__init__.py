"""What suggests next tokens."""
