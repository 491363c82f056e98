"""The order part of a plan, applied: weight updates in backward, for an unmodified script."""

from __future__ import annotations

from memplan.runtime.early.account import Account as Account
from memplan.runtime.early.updates import EarlyUpdates as EarlyUpdates
