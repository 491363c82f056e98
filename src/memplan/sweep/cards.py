"""The cards of a sweep, and what they cost, as they are typed."""

from __future__ import annotations

import math

from memplan.types.device import DeviceProfile, find_profile
from memplan.types.errors import UsageError


def read_cards(text: str) -> dict[str, DeviceProfile]:
    """`h100,a100-80gb`. Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    found = {name: find_profile(name) for name in names}
    if len({profile.name for profile in found.values()}) < len(names):
        raise UsageError(f"--gpu {text} names a card twice", f"--gpu {','.join(found)}")
    return found


def hourly(text: str) -> float:
    """`2.5/h`, of one GPU. Raises UsageError."""
    try:
        value = float(text.removesuffix("/h"))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{text!r} is no price of an hour", "--price 2.5/h")
    return value


def price_list(texts: list[str]) -> list[tuple[str, float]]:
    """`h100=2.5/h,l4=0.7/h`, with names as they are given. Raises UsageError."""
    found: list[tuple[str, float]] = []
    cards: list[str] = []
    for text in (part for one in texts for part in one.split(",")):
        name, equals, price = (word.strip() for word in text.partition("="))
        if not name or not equals:
            raise UsageError(f"--price {text!r} names no card", "--price h100=2.5/h")
        found.append((name, hourly(price)))
        cards.append(find_profile(name).name)
        if cards.count(cards[-1]) > 1:
            raise UsageError(f"--price of {name} is given twice", "one price for each card")
    return found


def read_prices(
    texts: list[str], profiles: dict[str, DeviceProfile], samples: int | None
) -> dict[str, float]:
    """`h100=2.5/h`: of one GPU for an hour, by the card as --gpu names it. Raises UsageError for a
    price of no card, and for a card without one where another has one."""
    found: dict[str, float] = {}
    for name, price in price_list(texts):
        card = find_profile(name).name
        meant = [gpu for gpu, profile in profiles.items() if profile.name == card]
        if not meant:
            raise UsageError(f"--price {name}={price:g}: no such --gpu", f"--gpu …,{name}")
        found[meant[0]] = price
    unpriced = [gpu for gpu in profiles if gpu not in found]
    if found and unpriced:
        raise UsageError(f"no price for {unpriced[0]}", f"--price {unpriced[0]}=2.5/h")
    if found and samples is None:
        raise UsageError("--price without --samples", "--samples 1000000")
    return found
