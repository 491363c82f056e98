"""Layer normalisation for chosen widths."""
