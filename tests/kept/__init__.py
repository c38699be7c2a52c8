"""What is kept of small cases, so that a change is noticed: `python -m tests.kept` writes it anew."""
