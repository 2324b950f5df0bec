#!/usr/bin/env bash
# Of a container: the Ray cluster that it belongs to answers, or, where it belongs to none, its program is neither
# stopped nor dead.
set -euo pipefail
if [[ -n ${RAY_ADDRESS:-} ]]; then
    timeout 5 bash -c ": < /dev/tcp/${RAY_ADDRESS/://}" # Ray itself is slow to find out that nobody is there
    exec timeout 25 ray health-check --address "$RAY_ADDRESS"
fi
state=$(sed 's/.*) //; s/ .*//' "/proc/${1:-1}/stat") # behind the name, which may have blanks
[[ $state != [TtZX] ]]
