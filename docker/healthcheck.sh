#!/usr/bin/env bash
# Of a container: the Ray cluster that it belongs to answers, or, where it belongs to none, its program is neither
# stopped nor dead.
set -euo pipefail
if [[ -n ${RAY_ADDRESS:-} ]]; then
    timeout 5 bash -c ": < /dev/tcp/${RAY_ADDRESS/://}" # Ray itself is slow to find out that nobody is there
    exec timeout 25 ray health-check --address "$RAY_ADDRESS"
fi
program=${1:-1}
case $(< "/proc/$program/comm") in
    tini | docker-init | dumb-init | catatonit) # of `docker run --init`: the program is its child
        read -r program _ < "/proc/$program/task/$program/children" || true # the list has no line end
        ;;
esac
state=$(sed 's/.*) //; s/ .*//' "/proc/$program/stat") # behind the name, which may have blanks
[[ $state != [TtZX] ]]
