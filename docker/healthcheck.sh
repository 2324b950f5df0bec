#!/usr/bin/env bash
# Health check of a container. With RAY_ADDRESS set: its Ray cluster answers. Otherwise: its program is neither stopped
# nor dead.
set -euo pipefail
if [[ -n ${RAY_ADDRESS:-} ]]; then
    timeout 5 bash -c ": < /dev/tcp/${RAY_ADDRESS/://}" # fails at once; Ray itself is slow to notice a missing head
    exec timeout 25 ray health-check --address "$RAY_ADDRESS"
fi
program=${1:-1}
case $(< "/proc/$program/comm") in
    tini | docker-init | dumb-init | catatonit) # an init of `docker run --init`: the program is its child
        read -r program _ < "/proc/$program/task/$program/children" || true # the list has no line end
        ;;
esac
state=$(sed 's/.*) //; s/ .*//' "/proc/$program/stat") # the state follows the name, which may contain blanks
[[ $state != [TtZX] ]]
