"""A service that validates its configuration before it starts."""

import json
import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("service.json")
TYPES = {
    "name": str,
    "port": int,
    "workers": int,
    "timeouts": dict,
    "log_level": str,
    "allowed_hosts": list,
}
LEVELS = ("debug", "info", "warning", "error")


def check(text):
    """Return the faults of a configuration."""
    try:
        config = json.loads(text)
    except ValueError as error:
        return [f"not valid JSON: {error}"]
    faults = [f"unknown key {key!r}" for key in config if key not in TYPES]
    faults += [f"missing key {key!r}" for key in TYPES if key not in config]
    for key, wanted in TYPES.items():
        if key in config and not isinstance(config[key], wanted):
            faults.append(f"{key} must be of type {wanted.__name__}, not {type(config[key]).__name__}")
    if config.get("log_level", LEVELS[0]) not in LEVELS:
        faults.append(f"log_level must be one of {', '.join(LEVELS)}")
    return faults


def main():
    faults = check(CONFIG.read_text())
    print("\n".join(faults) or "ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
