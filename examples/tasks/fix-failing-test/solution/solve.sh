#!/bin/sh
set -e
cd /app
sed -i 's|total += price_cents \* (100 - discount_percent) // 100 \* quantity|total += price_cents * quantity|' shop/cart.py
sed -i 's|^    return total$|    return total * (100 - discount_percent) // 100|' shop/cart.py
