#!/bin/sh
set -e
cd /app
sed -i -e 's/"8080"/8080/' -e 's/"read_s": 30,/"read_s": 30/' -e 's/log_levl/log_level/' service.json
python3 service.py --check
