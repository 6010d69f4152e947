#!/bin/sh
# Creates the repository. Authors and dates are fixed, so that the commits are the same everywhere.
set -e
export GIT_AUTHOR_NAME=Shop GIT_AUTHOR_EMAIL=shop@example.com
export GIT_COMMITTER_NAME=Shop GIT_COMMITTER_EMAIL=shop@example.com
export GIT_AUTHOR_DATE=2026-03-14T12:00:00Z GIT_COMMITTER_DATE=2026-03-14T12:00:00Z
git init -q -b main /app/shop
cd /app/shop
git config user.name Shop
git config user.email shop@example.com

printf 'TAX_PERCENT = 91\n' > tax.py
printf 'def gross(net):\n    return net\n' > price.py
git add . && git commit -q -m "Start the shop"
printf 'from tax import TAX_PERCENT\n\n\ndef gross(net):\n    return net * (100 + TAX_PERCENT) / 100\n' > price.py
git commit -q -a -m "Add the tax to prices"

git checkout -q -b experiment
printf 'print("debugging")\n' > debug.py
git add . && git commit -q -m "Print while debugging"
printf 'TAX_PERCENT = 19\n' > tax.py
git commit -q -a -m "Fix the tax rate"
printf 'COLOUR = "green"\n' > theme.py
git add . && git commit -q -m "Try another colour"
git checkout -q main
