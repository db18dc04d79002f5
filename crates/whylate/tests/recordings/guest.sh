#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# guest.sh FOLDER SLOW NAME...: records each of these while its workload runs, on whatever kernel this is. In a virtual
# machine (SLOW > 1), what was recorded comes as text.
folder=$1 slow=$2
shift 2
hostname golden
export TZ=UTC

# Injects what this kernel can: others say why not.
inject() {
    whylate inject "$@" >"$folder/inject.out" 2>&1 || tail -n 1 "$folder/inject.out" >&2
}

# record NAME SECONDS OPTIONS: the recorder's PID is in $recorder while the workload runs.
record() {
    name=$1 seconds=$2
    shift 2
    rm -f "$folder/$name.raw.whylate"
    whylate record -d "${seconds}s" "$@" -o "$folder/$name.raw.whylate" 2>"$folder/$name.said" &
    recorder=$!
    # Until it records: an emulated CPU attaches slowly.
    while [ ! -s "$folder/$name.raw.whylate" ] && kill -0 "$recorder"; do
        sleep 0.1
    done
}

recorded() {
    wait "$recorder" || cat "$folder/$name.said" >&2
    mv "$folder/$name.raw.whylate" "$folder/$name.raw"
    if [ "$slow" -gt 1 ]; then
        echo "begin $name"
        base64 "$folder/$name.raw"
        echo "end $name"
    fi
}

disk=$folder/data
[ -b /dev/nvme0n1 ] && disk=/dev/nvme0n1

for what; do
    case $what in
    sources-*)
        whylate inject sqpoll --for $((8 * slow))s --duty 5 --every 200ms --idle 20ms >"$folder/inject.out" 2>&1 &
        poller=$!
        sleep "$slow"
        record "$what" $((4 * slow)) --every "${slow}s" --why 10ms
        workload waits $((4 * slow)) "$folder" "$disk" &
        inject work --items $((2000 / slow / slow))
        inject softirq --for 20ms --times 2 --every 100ms --cpu 1
        inject irqs-off --for 20ms --times 2 --every 100ms --cpu 1
        recorded
        wait "$poller"
        ;;
    late-*)
        record "$what" $((4 * slow)) --every "${slow}s" --why 10ms --sources irqsoff,wq,timerlat,offcpu
        workload waits $((4 * slow)) "$folder" "$disk" &
        for kind in irqs-off softirq preempt-off hog; do
            inject "$kind" --for 30ms --times 4 --every 120ms --cpu 1
        done
        inject work --items 100 --busy 1ms
        recorded
        ;;
    paths-*)
        record "$what" $((3 * slow)) --every "${slow}s" --why 5ms --sources offcpu,block
        workload waits $((3 * slow)) "$folder" "$disk" &
        recorded
        ;;
    names-*)
        record "$what" $((3 * slow)) --every "${slow}s" --why 5ms --sources offcpu,wq,irqsoff
        workload names $((3 * slow)) &
        recorded
        ;;
    threads-*)
        record "$what" $((3 * slow)) --every "${slow}s" --why 5ms --sources offcpu,timerlat
        workload threads $((3 * slow)) &
        recorded
        ;;
    gap-*)
        record "$what" $((4 * slow)) --every 500ms --why 20ms --sources offcpu,wq,timerlat
        workload waits $((4 * slow)) "$folder" "$disk" &
        sleep "$slow"
        kill -STOP "$recorder"
        sleep "$slow"
        kill -CONT "$recorder"
        # Only a virtual machine's clock is its own.
        if [ "$slow" -gt 1 ]; then
            sleep 1
            date -s "@$(($(date +%s) + 3600))" >/dev/null
        fi
        recorded
        ;;
    quiet-*)
        record "$what" $((3 * slow)) --every "${slow}s" --why 40ms --sources wq,block,sqpoll,timerlat
        recorded
        ;;
    esac
    wait
done
