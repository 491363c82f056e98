"""memplan inside the tools that people have open: pytest, notebooks, trainers, agents.

Each module uses memplan as its users do (`import memplan`, `memplan.types`, `memplan.report`), and
imports its framework only where that is at work already.
"""
