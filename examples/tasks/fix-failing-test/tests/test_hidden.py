import sys
import unittest

sys.path.insert(0, "/app")
from shop.cart import cheapest, total_cents


class TestCart(unittest.TestCase):
    def test_sums_prices_without_a_discount(self):
        self.assertEqual(total_cents([(250, 2), (99, 1)]), 599)
        self.assertEqual(total_cents([]), 0)

    def test_applies_the_discount_to_the_sum(self):
        for price, quantity, percent in [(95, 3, 10), (1, 99, 50), (333, 7, 33), (199, 5, 100)]:
            expected = price * quantity * (100 - percent) // 100
            self.assertEqual(total_cents([(price, quantity)], discount_percent=percent), expected)
        self.assertEqual(total_cents([(95, 1), (95, 1), (5, 1)], discount_percent=10), 175)

    def test_finds_the_cheapest_item(self):
        self.assertEqual(cheapest([(250, 2), (99, 1)]), 99)
        self.assertIsNone(cheapest([]))


if __name__ == "__main__":
    unittest.main()
