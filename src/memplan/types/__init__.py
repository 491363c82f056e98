"""The vocabulary of memplan and its file formats. Imports nothing else of memplan."""
