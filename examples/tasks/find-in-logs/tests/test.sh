#!/bin/sh
# Compares the answer with the right one. White space around it does not matter.
answer=$(tr -d '[:space:]' < /app/answer.txt)
if [ "$answer" = "8927" ]; then reward=1; else reward=0; fi
echo "the answer is '$answer'"
echo "$reward" > /logs/verifier/reward.txt
