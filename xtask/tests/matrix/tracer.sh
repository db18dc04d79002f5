# SPDX-License-Identifier: MIT OR Apache-2.0
#
# usage: sh tracer.sh threads|readers|trace|cases|others|killed
#
# Tests `whylate timerlat` with the kernel's tracer; runs in a virtual machine with a kernel that has it, as root, with
# busybox only. Prints what is wrong, and a last line.

tracing=/sys/kernel/tracing
osnoise=$tracing/osnoise
failures=0
cd /tmp || exit 1

wrong() {
    echo "WRONG: $*"
    echo "--- its output:"
    cat out err 2>/dev/null
    echo "---"
    failures=$((failures + 1))
}
# Runs a command: its status is in $status, its output in the files `out` and `err`.
run() {
    "$@" >out 2>err
    status=$?
}
# Waits until the tracer is set up, and measures.
wait_for_tracer() {
    for _ in $(seq 60); do
        grep -qs timerlat $tracing/instances/whylate-*/current_tracer && break
        sleep 1
    done
    sleep 5
}
# Like run, with a check during it, however long that takes.
run_beside() {
    look=$1
    shift
    "$@" >out 2>err &
    measuring=$!
    wait_for_tracer
    $look
    # It may have ended by itself.
    kill -INT $measuring 2>/dev/null
    wait $measuring
    status=$?
}
expect() {
    [ "$status" = "$1" ] || wrong "status $status, not $1: $2"
}
settings() {
    for file in cpus stop_tracing_us stop_tracing_total_us print_stack timerlat_period_us options; do
        echo "$file: $(cat $osnoise/$file)"
    done
    ls $tracing/instances
}
thread_named() {
    for process in /proc/[0-9]*; do
        name=
        # A process for each would take too long beside threads of higher priority.
        { read -r name <"$process/comm"; } 2>/dev/null
        [ "$name" = "$1" ] && echo "${process#/proc/}"
    done
}
wait_for_thread() {
    for _ in $(seq 60); do
        tid=$(thread_named "$1")
        [ -n "$tid" ] && break
        sleep 1
    done
    echo "$tid"
}
# Prints the policy and the real-time priority (fields 41 and 40 of proc_pid_stat(5)) of a thread without a blank in its
# name.
policy_of() {
    # shellcheck disable=SC2046
    set -- $(cat "/proc/$1/stat")
    shift 39
    echo "$2 $1"
}

look_at_kernel_threads() {
    [ "$(cat $osnoise/cpus)" = 1 ] || wrong "-c: $(cat $osnoise/cpus)"
    [ "$(cat $osnoise/timerlat_period_us)" = 2000 ] || wrong "-p: $(cat $osnoise/timerlat_period_us)"
    grep -qw OSNOISE_WORKLOAD $osnoise/options || wrong "-k: $(cat $osnoise/options)"
    tid=$(wait_for_thread timerlat/1)
    [ "$(policy_of "$tid")" = "1 50" ] || wrong "-P: $(policy_of "$tid")"
    grep -q '^0::/ours$' "/proc/$tid/cgroup" || wrong "-C: $(cat "/proc/$tid/cgroup")"
    [ -z "$(thread_named timerlat/0)" ] || wrong "-c 1 measures CPU 0 as well"
}
# The kernel's threads: where, how often, at which priority, and in which cgroup.
threads() {
    mkdir -p cg && mount -t cgroup2 none cg && mkdir -p cg/ours
    run_beside look_at_kernel_threads whylate timerlat top -k -q -c 1 -p 2000 -P f:50 -C=ours
    expect 0 "-k"
    grep -q 'Thread Timer Latency' out || wrong "-k shows no table"
    grep -q 'Ret user' out && wrong "kernel threads return to user space"
    run whylate timerlat hist -k --json -d 1
    grep -q '"user"' out && wrong "kernel threads return to user space in JSON"
    umount cg
}

look_at_readers() {
    for cpu in 0 1; do
        pid=$(wait_for_thread timerlatu/$cpu)
        [ "$(policy_of "$pid")" = "1 95" ] || wrong "timerlatu/$cpu: $(policy_of "$pid")"
        grep -q "^Cpus_allowed_list:[[:space:]]*$cpu$" "/proc/$pid/status" || wrong "timerlatu/$cpu runs elsewhere"
    done
    grep -qw NO_OSNOISE_WORKLOAD $osnoise/options || wrong "-u: $(cat $osnoise/options)"
}
read_the_file() {
    for _ in 1 2 3 4 5; do
        taskset 1 head -c 1 $osnoise/per_cpu/cpu0/timerlat_fd
    done
}
# Threads in user space: whylate's own, also by default, and those of another program.
readers() {
    for option in "" -u; do
        # shellcheck disable=SC2086
        run_beside look_at_readers whylate timerlat top $option -q
        expect 0 "top $option"
        grep -q 'Ret user' out || wrong "threads in user space do not return there"
    done
    run whylate timerlat hist --json -d 2
    grep -q '"backend":"tracer"' out || wrong "auto does not take the tracer"
    [ -z "$(thread_named timerlatu/0)" ] || wrong "a reader is left"
    run whylate timerlat hist --backend bpf --json -d 2
    grep -q '"backend":"bpf"' out || wrong "--backend bpf is ignored"
    run_beside read_the_file whylate timerlat hist -U --json
    expect 0 "-U"
    grep -q '"cpu":"0"},"histograms":{"irq":{"count":[1-9]' out || wrong "-U does not measure who reads"
    grep -q '"cpu":"1"},"histograms":{"irq":{"count":0' out || wrong "-U measures somebody else"
}

# What is saved at a stop, with events. The hog has a higher priority than the measured threads.
trace() {
    # What the kernel finds late may be in time for whylate's BPF program, if the emulator stops the CPU between the
    # two: it says so, without a cause.
    for try in 1 2 3; do
        whylate inject hog --for 45ms --times 20 --every 500ms --cpu 1 >hog 2>&1 &
        hog=$!
        # On the hog's CPU only, and longer than an emulator stops it: 20 ms happen.
        run whylate timerlat top -k -q -c 1 -P f:10 -T 40000 -s 1000 -t=trace.txt --trace-buffer-size 512 \
            -e sched:sched_switch --filter 'prev_pid==0' --trigger 'hist:key=next_pid' -e irq
        expect 2 "-T"
        wait $hog || wrong "inject hog: $(cat hog)"
        grep -q 'it was not recorded who had it' out || break
        echo "another try: the stop has no cause"
        rm -f trace.txt sched_sched_switch_hist.txt
    done
    grep -q 'hit stop tracing' out || wrong "-T does not say why it ends"
    grep -q 'whylate-hog:' out || wrong "the hog is not blamed"
    grep -q 'Saving trace to trace.txt' out || wrong "-t does not say where the trace is"
    grep -q 'context thread timer_latency' trace.txt || wrong "-t has no samples"
    grep -q 'irq_noise' trace.txt || wrong "-t has no noise"
    grep -q 'sched_switch: .*prev_pid=0 ' trace.txt || wrong "-e is ignored"
    grep 'sched_switch: ' trace.txt | grep -vq 'prev_pid=0 ' && wrong "--filter is ignored"
    grep -qE 'irq_handler_entry|softirq_entry' trace.txt || wrong "-e of a group is ignored"
    grep -q '<stack trace>' trace.txt || wrong "-s is ignored"
    grep -q 'next_pid' sched_sched_switch_hist.txt || wrong "--trigger is ignored"
    [ "$(stat -c %a trace.txt)" = 600 ] || wrong "others may read the trace"
    rm -f trace.txt
    run whylate timerlat top -q -i 1 -t=trace.txt
    expect 2 "-i"
    grep -q 'context *irq timer_latency' trace.txt || wrong "-i has no samples"
    grep -q 'IRQ latency:' out || wrong "-i is not explained"
    run whylate timerlat top -q -d 2 --on-end trace,file=end.txt
    grep -q 'timer_latency' end.txt || wrong "--on-end trace has no samples"
    run whylate timerlat top -q -T 1 --on-threshold continue -d 12
    expect 0 "--on-threshold continue"
    [ "$(grep -c 'hit stop tracing$' out)" -gt 2 ] || wrong "it does not go on after a stop"
    run whylate timerlat hist -T 1 --no-index --with-zeros --json -d 5
    expect 2 "a stop of a thread"
    grep -q '"thread":{"count":[1-9]' out || wrong "what stopped it is not counted"
    run whylate timerlat top -k -q -t -e sched:sched_waking --trigger 'hist:keys=pid:ts0=common_timestamp.usecs' -T 1
    expect 2 "a histogram with a variable"
    run whylate timerlat top -k -e no_such:event -t -d 1
    expect 1 "an event that is not there"
    grep -q 'no_such' err || wrong "it does not say which event is not there"
}

# Checks a command line: its status, how a line of its output begins, and the arguments. Standard error may come
# anywhere, as on a terminal.
takes() {
    wanted=$1
    begins=$2
    shift 2
    rm -f timerlat_trace.txt custom_filename.txt
    whylate timerlat "$@" >out 2>&1
    status=$?
    : >err
    expect "$wanted" "$*"
    grep -q "^$begins" out || wrong "no line of $* begins with '$begins'"
    case $begins in
    "  Saving trace to "*)
        # The kernel's trace, or that of the backend bpf.
        grep -qsE 'timer_latency|^# The latest' "${begins#  Saving trace to }" || wrong "$*: nothing is in the trace"
        ;;
    esac
}
# The command lines of rtla's own tests, except for some durations, with whylate in rtla's place.
cases() {
    echo_output='shell,command=echo TestOutput'
    fails='shell,command=echo -n 1; false'
    never='shell,command=echo -n 2'
    takes 0 'Usage: ' --help
    takes 2 '  Saving trace to timerlat_trace.txt' top -s 3 -T 10 -t
    takes 0 'CPU COUNT' top -P F:1 -c 0 -d 3s -q
    takes 2 'whylate timerlat hit' top -i 2 -c 0 -n -d 10s
    takes 2 'Printing CPU tasks:' top -a 5 --dump-tasks
    takes 2 'whylate timerlat hit' top --aa-only 5
    takes 2 '  Saving trace to timerlat_trace.txt' top -s 3 -T 10 -t --no-aa
    takes 0 'Index   IRQ-000' hist -c 0 -d 3s
    takes 2 '# Time unit is nanoseconds (ns)' hist -i 2 -c 0 -n -d 10s
    takes 2 '  Saving trace to timerlat_trace.txt' hist -T 2 -t
    takes 2 '  Saving trace to custom_filename.txt' hist -T 2 -t custom_filename.txt
    takes 2 '  Saving trace to timerlat_trace.txt' hist -T 2 --on-threshold trace
    takes 2 '  Saving trace to custom_filename.txt' hist -T 2 --on-threshold trace,file=custom_filename.txt
    takes 2 'TestOutput$' hist -T 2 --on-threshold "$echo_output"
    takes 2 '12$' hist -T 2 --on-threshold 'shell,command=echo -n 1' --on-threshold 'shell,command=echo 2'
    takes 2 '1# RTLA timerlat histogram$' hist -T 2 --on-threshold "$fails" --on-threshold "$never"
    # rtla itself continues this line with its last table.
    takes 2 1 top -T 2 --on-threshold "$fails" --on-threshold "$never"
    takes 0 'TestOutput$' hist -T 2 -d 3s --on-threshold "$echo_output" --on-threshold continue
    takes 0 'TestOutput$' top -q -T 2 -d 3s --on-threshold "$echo_output" --on-threshold continue
    takes 0 '  Saving trace to timerlat_trace.txt' hist -d 3s --on-end trace
    takes 0 '  Saving trace to timerlat_trace.txt' top -d 3s --on-end trace
    # Kernels before 7.2 cannot align; threads of whylate can.
    if [ ! -e $osnoise/timerlat_align_us ]; then
        takes 0 'whylate: timerlat uses the bpf backend: .* cannot align' hist -A 100 -d 1s
        takes 3 'whylate: cannot attach timerlat: .* cannot align' hist -k -A 100 -d 1s
    fi
}

restart_the_tracer() {
    echo PANIC_ON_STOP >$osnoise/options
    echo NO_PANIC_ON_STOP >$osnoise/options
    # It ends by itself.
    for _ in $(seq 60); do
        grep -q 'another program' err && break
        sleep 1
    done
}
# Another program has the tracer.
others() {
    mkdir $tracing/instances/another
    echo timerlat >$tracing/instances/another/current_tracer
    run whylate timerlat top -q -d 1 --backend tracer
    expect 3 "the tracer is in use"
    grep -q 'another uses the timerlat tracer' err || wrong "it does not say who has the tracer"
    run whylate timerlat top -q -d 2
    expect 0 "the tracer is in use"
    grep -q 'uses the bpf backend: ' err || wrong "it does not say why it takes the other backend"
    echo nop >$tracing/instances/another/current_tracer
    # The kernel kills a reader of timerlat_fd when the settings change.
    run_beside restart_the_tracer whylate timerlat top -q
    expect 1 "a reader is killed"
    grep -q 'another program has changed the settings' err || wrong "it does not say that a reader was killed"
    rmdir $tracing/instances/another
}

killed() {
    for option in -k -u; do
        whylate timerlat top -q -p 3000 -T 1000000 -t $option \
            -e sched:sched_waking --trigger 'hist:keys=pid:ts0=common_timestamp.usecs' >out 2>err &
        measuring=$!
        wait_for_tracer
        [ "$(settings)" = "$before" ] && wrong "$option changes nothing"
        kill -9 $measuring
        wait $measuring
        [ "$(settings)" = "$before" ] && wrong "nothing is left over"
        run whylate wq -d 1s
        expect 0 "the next whylate"
        grep -q 'an earlier whylate was killed: restored [1-9][0-9]* kernel settings and removed 2 tracing instances' err ||
            wrong "the next whylate does not say what it has restored"
        [ "$(settings)" = "$before" ] || wrong "$option was killed, and the next whylate leaves: $(settings)"
    done
}

before=$(settings)
"$1"
[ "$(settings)" = "$before" ] || wrong "$1 leaves settings changed: $(settings)"
echo "$failures wrong"
