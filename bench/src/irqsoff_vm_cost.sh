# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs the load $1 times with each watcher, each time between two unwatched runs. The very first run fills caches.
cd /tmp
instance=/sys/kernel/tracing/instances/bare
load() {
    $LOAD >load.out 2>&1 || { cat load.out; exit 1; }
    echo "@ $1 $(sed -n 's/.*Total time: *\([0-9.]*\).*/\1/p' load.out)"
}
watched() {
    name=$1
    shift
    rm -f out
    "$@" >out 2>err &
    watcher=$!
    tries=0
    until [ -s out ]; do
        sleep 0.5
        tries=$((tries + 1))
        [ $tries -lt 240 ] || { cat err; exit 1; }
    done
    sleep 1
    load $name
    kill -INT $watcher
    wait $watcher || { cat err; exit 1; }
    sleep 1
}
bare_tracer() {
    mkdir $instance
    echo 0 >$instance/options/function-trace
    echo irqsoff >$instance/current_tracer
    load bare
    echo nop >$instance/current_tracer
    rmdir $instance
    sleep 1
}
one() {
    case $1 in
    bare) bare_tracer ;;
    bpftrace) watched bpftrace bpftrace -e "$SCRIPT" ;;
    *) watched $1 whylate irqsoff --backend $1 ;;
    esac
}
load first >/dev/null
round=0
while [ $round -lt $1 ]; do
    load nothing
    # The watchers take turns at being first.
    for turn in 0 1 2 3 4; do
        case $(((turn + round) % 5)) in
        0) one events ;;
        1) one tracer ;;
        2) one bare ;;
        3) one bpftrace ;;
        4) one ticks ;;
        esac
        load nothing
    done
    round=$((round + 1))
done
echo "@ end"
