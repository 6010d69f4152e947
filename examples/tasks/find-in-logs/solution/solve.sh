#!/bin/sh
set -e
awk '$3 == "/api/orders" && $4 == 500 { sub("ms", "", $5); if ($5 + 0 > slowest) slowest = $5 + 0 }
    END { print slowest }' /app/logs/*.log > /app/answer.txt
