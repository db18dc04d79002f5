# SPDX-License-Identifier: MIT OR Apache-2.0
#
# usage: sh torture.sh hotplug|clocks
#
# What each source does while a CPU goes and comes back, or while the machine sleeps and its clock is set; runs in a virtual machine with
# busybox alone, as root. Prints what is wrong, and a last line.

tracing=/sys/kernel/tracing
cpu1=/sys/devices/system/cpu/cpu1/online
alarm=/sys/class/rtc/rtc0/wakealarm
failures=0
part=$1
cd /tmp || exit 1

wrong() {
    echo "WRONG: $*"
    echo "--- its output:"
    cut -c 1-1000 out err 2>/dev/null | tail -n 20
    echo "---"
    failures=$((failures + 1))
}
# Until all is attached: what it holds in the kernel has not changed for a while, which takes seconds on an emulated CPU.
wait_until_it_measures() {
    held= calm=0
    for _ in $(seq 30); do
        sleep 1
        now=$(ls -l /proc/$measuring/fd 2>/dev/null | grep -c -e bpf -e perf_event)
        [ "$now" = "$held" ] && [ "$now" != 0 ] && calm=$((calm + 1)) || calm=0
        held=$now
        [ $calm = 4 ] && break
    done
}
# Each source by each way of measuring, and all at once.
each() {
    for words in '' 'wq --why 1ms' 'timerlat hist' irqsoff 'offcpu --why 1ms' 'offcpu --backend trace' sqpoll; do
        what="$part beside whylate $words"
        # shellcheck disable=SC2086
        whylate $words --json -d 20s >out 2>err &
        measuring=$!
        wait_until_it_measures
        "$part"
        wait $measuring
        status=$?
        [ $status = 0 ] || wrong "$what: status $status"
        grep -q '^{' out || wrong "$what: it told nothing"
        grep -q panicked err && wrong "$what: it panicked"
        # By seconds: nothing here is late for so long but what was away.
        grep -oE '"latency_ns":([4-9][0-9]{9}|[0-9]{11}).*' out >late && wrong "$what: what was away is told as late: $(cut -c 1-300 late)"
        echo "$what: $(grep -oE '"(latency_ns|max_ns)":[0-9]+' out | grep -oE '[0-9]+' | sort -n | tail -n 1) ns at most"
    done
}
# Interrupts of the account's timer on CPU 1, for 2 s.
beats() {
    mkdir $tracing/instances/beats
    echo 1 >$tracing/instances/beats/events/timer/hrtimer_expire_entry/enable
    sleep 2
    echo 0 >$tracing/instances/beats/events/timer/hrtimer_expire_entry/enable
    grep -c '\[001\].*perf_swevent_hrtimer' $tracing/instances/beats/trace
    rmdir $tracing/instances/beats
}

# A CPU goes for 5 s. What explains late events has a timer on it again.
hotplug() {
    case $words in *--why*) before=$(beats) ;; esac
    echo 0 >$cpu1
    sleep 5
    echo 1 >$cpu1
    sleep 3
    case $words in
    *--why*)
        after=$(beats)
        echo "$what: $before heartbeats before, $after after"
        [ "$before" -ge 100 ] || wrong "$what: the CPU has no timer"
        [ "$after" -ge 100 ] || wrong "$what: the CPU that came back has no timer"
        ;;
    esac
}
# It is an hour later, the machine sleeps for some seconds, and it is two hours earlier.
clocks() {
    date -s "@$(($(date +%s) + 3600))" >/dev/null
    slept_s=$(date +%s)
    echo 0 >$alarm
    echo +8 >$alarm
    echo mem >/sys/power/state || wrong "$what: it does not sleep"
    echo "$what: slept for $(($(date +%s) - slept_s)) s"
    date -s "@$(($(date +%s) - 7200))" >/dev/null
}

settings() {
    ls $tracing/instances
    cat $tracing/current_tracer $tracing/tracing_on
}
settings=$(settings)
without=$(beats)
[ "$without" = 0 ] || wrong "$without heartbeats are there without whylate"
each
[ "$(settings)" = "$settings" ] || wrong "$part leaves settings changed: $(settings)"
echo "$failures wrong"
