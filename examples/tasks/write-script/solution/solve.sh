#!/bin/sh
set -e
cat > /app/top_words <<'PROGRAM'
#!/bin/sh
tr 'A-Z' 'a-z' < "$1" | tr -cs 'a-z' '\n' | grep . | LC_ALL=C sort | uniq -c | awk '{print $1, $2}' |
    LC_ALL=C sort -k1,1nr -k2,2 | head -n "$2"
PROGRAM
chmod +x /app/top_words
