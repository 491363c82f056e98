"""From a trace and a GPU to an answer: how much memory, of what, and does it fit."""
