# SPDX-License-Identifier: MIT OR Apache-2.0
#
# usage: sh irqsoff.sh hotplug|killed|in_use|no_tracefs|console BACKEND...
#
# Tests `whylate irqsoff` under disturbances, by these backends; runs in a virtual machine with busybox only, as root.
# All but the last part need the tracers and the module that makes delays. Prints what is wrong, and a last line.

tracing=/sys/kernel/tracing
cpu1=/sys/devices/system/cpu/cpu1/online
failures=0
part=$1
shift
backends=$*
cd /tmp || exit 1

wrong() {
    echo "WRONG: $*"
    echo "--- its output:"
    cut -c 1-2000 out err 2>/dev/null | tail -n 20
    echo "---"
    failures=$((failures + 1))
}
# Runs a command: its status is in $status, its output in the files `out` and `err`.
run() {
    "$@" >out 2>err
    status=$?
}
expect() {
    [ "$status" = "$1" ] || wrong "status $status, not $1: $2"
}
# Expects a single line on standard error that contains $2.
expect_error() {
    expect 3 "$1"
    [ "$(wc -l <err)" = 1 ] || wrong "more than one line: $1"
    grep -q "$2" err || wrong "it does not say: $2"
}
settings() {
    ls $tracing/instances
    cd $tracing && cat current_tracer tracing_thresh tracing_max_latency trace_clock tracing_cpumask 2>/dev/null
}
# Disables interrupts on CPU 1 for $1 microseconds.
delay() {
    insmod /lib/modules/preemptirq_delay_test.ko test_mode=irq delay="$1" cpu_affinity=1
    rmmod preemptirq_delay_test
}

# A CPU that goes offline and comes back has no section in between, and is measured afterwards.
hotplug() {
    for backend in $backends; do
        for _ in 1 2 3; do
            whylate irqsoff --backend $backend --json --min 40ms --slower 40ms 1 14 >out 2>err &
            measuring=$!
            sleep 3
            echo 0 >$cpu1
            sleep 4
            echo 1 >$cpu1
            # The timer of a CPU that is back is started at the next output.
            sleep 2
            for _ in 1 2 3; do
                delay 60000
                sleep 0.2
            done
            wait $measuring
            status=$?
            expect 0 "$backend: a CPU goes and comes back"
            [ "$(grep -c '^{' out)" = 14 ] || wrong "$backend: not a line a second"
            # Seconds of latency.
            grep -qE '"latency_ns":[2-9][0-9]{9}|"latency_ns":[0-9]{11}' out && wrong "$backend: a CPU that was gone is reported as a section"
            # An emulated CPU that stops may hide delays from the tracer, but not each time.
            grep -q '"task":"irq_test:' out && break
        done
        grep -q '"task":"irq_test:' out || wrong "$backend: a CPU that came back is not measured"
    done
    # An offline CPU cannot be selected.
    echo 0 >$cpu1
    for backend in $backends; do
        run whylate irqsoff --backend $backend -c 1 -d 1s
        expect_error "$backend: a CPU that is offline" 'CPU 1 is not online'
    done
    echo 1 >$cpu1
}

# After kill -9, the next whylate restores what the killed one changed.
killed() {
    whylate irqsoff --backend tracer >out 2>err &
    measuring=$!
    for _ in $(seq 60); do
        grep -qs irqsoff $tracing/instances/whylate-*/current_tracer && break
        sleep 1
    done
    kill -9 $measuring
    wait $measuring
    ls $tracing/instances | grep -q whylate- || wrong "nothing is left over"
    grep -q irqsoff $tracing/instances/whylate-*/current_tracer || wrong "the tracer is not left over"
    run whylate irqsoff --backend tracer --json -d 2s
    expect 0 "the next whylate"
    grep -q 'an earlier whylate was killed: .*removed 1 tracing instance' err || wrong "it does not say what it has put back"
    grep -q '"backend":"tracer"' out || wrong "the tracer is still in use"
}

in_use() {
    mkdir $tracing/instances/another
    echo preemptoff >$tracing/instances/another/current_tracer
    run whylate irqsoff --backend tracer -d 1s
    expect_error "the tracer is in use" 'instances/another uses the preemptoff tracer, and only one can: end that first'
    [ "$(cat $tracing/instances/another/current_tracer)" = preemptoff ] || wrong "it was taken away"
    echo nop >$tracing/instances/another/current_tracer
    rmdir $tracing/instances/another
}

no_tracefs() {
    cp "$(command -v whylate)" program
    # shellcheck disable=SC2016
    for backend in $backends; do
        run unshare -m sh -c 'for at in /sys/kernel/tracing /sys/kernel/debug/tracing /sys/kernel/debug; do umount -l $at 2>/dev/null; done
            exec ./program irqsoff --backend $1 --json -d 1s' sh $backend
        case $backend in
        tracer) expect_error "tracefs is not mounted" 'tracefs is not mounted' ;;
        *) expect 0 "$backend needs no tracefs" ;;
        esac
    done
}

# The serial line is an emulated 8250: each character is written by polling, with interrupts off.
console() {
    level=$(cut -f 1 /proc/sys/kernel/printk)
    text=$(printf 'x%.0s' $(seq 800))
    echo 8 >/proc/sys/kernel/printk
    for backend in $backends; do
        rm -f out
        whylate irqsoff --backend $backend >out 2>err &
        measuring=$!
        until [ -s out ]; do
            sleep 0.5
        done
        sleep 2
        for number in $(seq 100); do
            echo "<4>storm $number $text" >/dev/kmsg
        done
        sleep 1
        kill -INT $measuring
        wait $measuring
        status=$?
        expect 0 "$backend"
        grep 'console output' out
        grep -q 'console output keeps interrupts off, for .* or longer: lower the console log level (dmesg -n 1), now 8;' out ||
            wrong "$backend: no advice about the console"
    done
    echo "$level" >/proc/sys/kernel/printk
}

before=$(settings)
"$part"
[ "$(settings)" = "$before" ] || wrong "$part leaves settings changed: $(settings)"
echo "$failures wrong"
