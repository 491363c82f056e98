"""Artefacts rendered for people and for other tools."""
