# SPDX-License-Identifier: MIT OR Apache-2.0
#
# usage: sh torture.sh hotplug|clocks
#
# Tests each source while a CPU goes offline and comes back, or while the machine sleeps and its clock is set; runs in a
# virtual machine with busybox only, as root. Prints what is wrong, a row for the table of `make torture`, and a last
# line.

tracing=/sys/kernel/tracing
cpu1=/sys/devices/system/cpu/cpu1/online
failures=0 times=0 panics=0 hangs=0 letters=0
part=$1
cd /tmp || exit 1

wrong() {
    echo "WRONG: $*"
    echo "--- its output:"
    cut -c 1-1000 out err 2>/dev/null | tail -n 20
    echo "---"
    failures=$((failures + 1))
}
# Waits until all is attached: what it holds in the kernel has not changed for a while, which takes seconds on an
# emulated CPU.
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
# Waits for the end of whylate, and kills it if it hangs, so that the next one is not delayed. An emulated CPU takes its
# time to attach.
wait_for_its_end() {
    for _ in $(seq 120); do
        kill -0 $measuring 2>/dev/null || break
        sleep 1
    done
    if kill -9 $measuring 2>/dev/null; then
        wrong "$what: it does not end"
        hangs=$((hangs + 1))
    fi
    wait $measuring
    status=$?
}
# Runs each source with each way of measuring, and all at once.
each() {
    for words in '' 'wq --why 1ms' 'timerlat hist' irqsoff 'offcpu --why 1ms' 'offcpu --backend trace' sqpoll 'block --why 1ms'; do
        what="$part beside whylate $words"
        # shellcheck disable=SC2086
        whylate $words --json -d 20s >out 2>err &
        measuring=$!
        wait_until_it_measures
        # What is not seen while all sources measure would not be seen as a leftover either.
        for kind in programs maps links; do
            [ -n "$words" ] || eval "[ \$($kind) -gt \$$kind ]" || wrong "$what: its $kind are not seen"
        done
        "$part"
        times=$((times + 1))
        wait_for_its_end
        [ $status = 0 ] || wrong "$what: status $status"
        grep -q '^{' out || wrong "$what: it printed nothing"
        if grep -q panicked err; then
            wrong "$what: it panicked"
            panics=$((panics + 1))
        fi
        if [ "$(cat out err | tr -d '\001-\010\013-\037\177' | wc -c)" != "$(cat out err | wc -c)" ]; then
            wrong "$what: it prints control characters"
            letters=$((letters + 1))
        fi
        # Seconds of latency: nothing here is that late except what was offline or asleep, or what waits for an emulated
        # CPU's work.
        late=$(grep -oE '"latency_ns":([4-9][0-9]{9}|[0-9]{11})[^{}]*([{]"kind":"[a-z_]*"|[}])' out | grep -v '"running"$' | cut -c 1-300)
        [ -z "$late" ] || wrong "$what: what was away is reported as late: $late"
        echo "$what: $(grep -oE '"(latency_ns|max_ns)":[0-9]+' out | grep -oE '[0-9]+' | sort -n | tail -n 1) ns at most"
    done
}
# Counts interrupts of the account's timer on CPU 1, for 2 s.
beats() {
    mkdir $tracing/instances/beats
    echo 1 >$tracing/instances/beats/events/timer/hrtimer_expire_entry/enable
    sleep 2
    echo 0 >$tracing/instances/beats/events/timer/hrtimer_expire_entry/enable
    grep -c '\[001\].*perf_swevent_hrtimer' $tracing/instances/beats/trace
    rmdir $tracing/instances/beats
}

# A CPU goes offline for 5 s. Afterwards the source that explains late events has a timer on it again.
hotplug() {
    case $words in
    *--why*)
        # A CPU that is too slow to load the next program also looks as if all was attached.
        for _ in $(seq 10); do
            before=$(beats)
            [ "$before" -lt 100 ] || break
        done
        ;;
    esac
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
# The clock is set an hour ahead, the machine sleeps until the host wakes it, and the clock is set two hours back.
clocks() {
    date -s "@$(($(date +%s) + 3600))" >/dev/null
    slept_s=$(date +%s)
    echo mem >/sys/power/state || wrong "$what: it does not sleep"
    slept_s=$(($(date +%s) - slept_s))
    echo "$what: slept for $slept_s s"
    [ $slept_s -ge 5 ] || wrong "$what: it wakes too soon"
    date -s "@$(($(date +%s) - 7200))" >/dev/null
}

settings() {
    (
        cd $tracing && for file in current_tracer tracing_on set_event set_event_pid trace_clock trace_options tracing_cpumask \
            tracing_thresh buffer_size_kb osnoise/*; do
            [ ! -f "$file" ] || echo "$file: $(cat "$file")"
        done
    )
    for file in /sys/devices/system/cpu/cpu*/cpuidle/*/disable; do [ ! -f "$file" ] || echo "$file: $(cat "$file")"; done
    for file in bpf_stats_enabled sched_schedstats perf_event_paranoid; do
        echo "$file: $(cat /proc/sys/kernel/$file 2>/dev/null)"
    done
}
# Counts each kind of leftover. Without bpftool: a program has its code among the kernel's symbols, larger maps have
# memory in vmallocinfo, and a link lives as long as its descriptor is open.
programs() { grep -c '\[bpf\]$' /proc/kallsyms; }
maps() { grep -c -e map_alloc -e ringbuf /proc/vmallocinfo; }
links() { cat /proc/[0-9]*/fdinfo/* 2>/dev/null | grep -c '^link_id:'; }
instances() { ls $tracing/instances | wc -l; }
files() { ls -d /tmp/* /var/tmp/* /dev/shm/* /run/whylate/* 2>/dev/null | grep -v -e '\.lock$' -e '^/tmp/\(out\|err\|before\)$' | wc -l; }
# Counts the threads of whylate, and the kernel's without workers, which come and go.
threads() {
    for process in /proc/[0-9]*; do
        name=$(cut -d ' ' -f 2 "$process/stat" 2>/dev/null)
        case $(readlink "$process/exe"):$name in
        */whylate:*) ls "$process/task" ;;
        :\(kworker*) ;;
        :*) echo "$name" ;;
        esac
    done | wc -l
}
kinds='programs maps links instances files threads'
# Sets $more to how many more there are than before, after the time that the kernel may take to free them.
left() {
    for _ in $(seq 60); do
        now=$("$1")
        [ "$now" -gt "$2" ] || break
        sleep 1
    done
    more=$((now - $2))
    [ $more -gt 0 ] || more=0
}

echo 1 >/proc/sys/net/core/bpf_jit_kallsyms 2>/dev/null
# The first run creates directories that stay.
whylate wq -d 1s >/dev/null 2>&1
settings >before
for kind in $kinds; do eval "$kind=$("$kind")"; done
without=$(beats)
[ "$without" = 0 ] || wrong "$without heartbeats are there without whylate"
each
other=$((failures - panics - hangs - letters))
for kind in $kinds; do
    eval "left $kind \$$kind"
    [ $more = 0 ] || wrong "$part leaves $more $kind behind"
    eval "$kind=$more"
done
settings >after
changed=$(diff before after | grep -c '^+[^+]')
[ "$changed" = 0 ] || wrong "$part leaves settings changed: $(diff before after)"
echo "row: $part|$times|$programs|$maps|$links|$instances|$changed|$files|$threads|$panics|$hangs|$letters|$other|in a virtual machine"
echo "$failures wrong"
