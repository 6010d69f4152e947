import unittest

from shop.cart import cheapest, total_cents


class TestCart(unittest.TestCase):
    def test_sums_prices_without_a_discount(self):
        self.assertEqual(total_cents([(250, 2), (99, 1)]), 599)

    def test_applies_the_discount_to_the_sum(self):
        self.assertEqual(total_cents([(95, 3)], discount_percent=10), 256)

    def test_finds_the_cheapest_item(self):
        self.assertEqual(cheapest([(250, 2), (99, 1)]), 99)


if __name__ == "__main__":
    unittest.main()
