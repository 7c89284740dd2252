"""Commands by group: parse with typer, call one function, render."""
