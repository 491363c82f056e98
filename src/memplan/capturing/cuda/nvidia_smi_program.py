"""What the stand-in for `nvidia-smi` runs: standard library only, in a process of its own."""

import json
import sys
from pathlib import Path

_UNITS = {"memory": "MiB", "utilization": "%", "power": "W"}
_LONG = {"-i": "--id", "-L": "--list-gpus", "-f": "--filename", "-l": "--loop"}
_WITH_A_VALUE = ("--id", "--filename", "--loop")
Card = dict[str, str]


def main(cards: list[Card], words: list[str]) -> int:
    """Print what is asked for; returns the exit code."""
    options = _options(words)
    if "--id" in options:
        wanted = set(options["--id"].split(","))
        cards = [c for c in cards if wanted & {c["index"], c["uuid"], c["pci.bus_id"]}]
        if not cards:
            print("No devices were found")
            return 6
    query = next((name for name in options if name.startswith("--query-")), None)
    if "--list-gpus" in options:
        for card in cards:
            print(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})")
    elif query is not None:
        layout = options.get("--format", "").split(",")
        if layout[0] != "csv":
            print('"--format=" switch is missing or its value is not known.')
            return 2
        _print_table(cards if query == "--query-gpu" else [], options[query].split(","), layout)
    elif options.keys() <= {"--id"}:
        _print_summary(cards)
    else:
        print(f"memplan's nvidia-smi does not answer: {' '.join(words)}", file=sys.stderr)
        return 2
    return 0


def _options(words: list[str]) -> dict[str, str]:
    found = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        name = _LONG.get(name, name)
        found[name] = next(rest, "") if name in _WITH_A_VALUE and not equals else value
    return found


def _unit(field: str) -> str:
    return _UNITS.get(field.partition(".")[0], "")


def _print_table(cards: list[Card], asked: list[str], layout: list[str]) -> None:
    fields = [field.strip() for field in asked]
    if "noheader" not in layout:
        print(", ".join(f"{field} [{_unit(field)}]" if _unit(field) else field for field in fields))
    for card in cards:
        row = [card.get(field, "[N/A]") for field in fields]
        if "nounits" in layout:
            row = [
                text.split(" ")[0] if _unit(field) else text
                for field, text in zip(fields, row, strict=True)
            ]
        print(", ".join(row))


def _print_summary(cards: list[Card]) -> None:
    line = "+" + "-" * 89 + "+"
    driver, cuda = cards[0]["driver_version"], cards[0]["cuda_version"]
    title = f"NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {cuda}"
    rows = [line, f"| {title:<88}|", line]
    for card in cards:
        used = f"{card['memory.used']} / {card['memory.total']}".replace(" MiB", "MiB")
        name = f"{card['index']:>3}  {card['name']}"
        rows.append(f"| {name:<45} {card['pci.bus_id']:<42}|")
        rows.append(f"| N/A   40C    P0    70W / N/A {used:>25}      0%      {'Default':<20}|")
        rows.append(line)
    rows += [f"| {'Processes:':<88}|", f"|  {'No running processes found':<87}|", line]
    print("\n".join(rows))


if __name__ == "__main__":
    beside = Path(sys.argv[0]).resolve().with_suffix(".json")
    sys.exit(main(json.loads(beside.read_text()), sys.argv[1:]))
