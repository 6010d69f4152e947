#!/bin/sh
# Runs the tests and writes the reward: 1 if all of them pass, else 0.
if python3 /tests/test_top_words.py -v 2>&1; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
