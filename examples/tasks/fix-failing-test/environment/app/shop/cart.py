"""Prices of a shopping cart, in cents."""


def total_cents(items, discount_percent=0):
    """Return the price of all items after the discount.

    The discount applies to the whole sum. Fractions of a cent are dropped once, at the end.

    Args:
        items: Pairs of a price in cents and a quantity.
        discount_percent: Discount between 0 and 100.
    """
    total = 0
    for price_cents, quantity in items:
        total += price_cents * (100 - discount_percent) // 100 * quantity
    return total


def cheapest(items):
    """Return the lowest price among the items, or None if there are none."""
    return min((price_cents for price_cents, _ in items), default=None)
