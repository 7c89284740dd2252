"""What the wheel must carry."""
