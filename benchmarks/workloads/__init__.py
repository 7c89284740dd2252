"""What is trained while it is measured."""
