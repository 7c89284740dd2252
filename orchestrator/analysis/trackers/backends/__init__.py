"""One module for each tracker's library; ``port.py`` says what each can do."""
