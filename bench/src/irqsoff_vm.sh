# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs each backend of `whylate irqsoff` with each kind of delay, $1 times each. Pauses leave time to report a delay before the
# next; everything else runs on the other CPU.
cd /tmp
taskset -p 1 $$ >/dev/null
one() {
    backend=$1 mode=$2 us=$3
    [ $mode = irq ] && what= || what=--preempt
    [ $backend = tracer-all ] && cpus= || cpus='-c 1'
    floor=$(($us / 2))us
    rm -f out
    whylate irqsoff $what --backend ${backend%-all} $cpus --json --slower $floor --min $floor --period 1ms 1 >out 2>err &
    measuring=$!
    # Its first line comes a second after its start.
    until [ -s out ]; do
        sleep 0.2
    done
    insmod /lib/modules/preemptirq_delay_test.ko test_mode=$mode delay=$us cpu_affinity=1
    for number in $(seq 2 $times); do
        usleep 50000
        echo 1 >/sys/kernel/preemptirq_delay_test/trigger
    done
    usleep 200000
    rmmod preemptirq_delay_test
    kill -INT $measuring
    wait $measuring || { cat err; exit 1; }
    echo "@ $backend $mode $us"
    cat out
}
times=$1
for us in 500 1000 5000 20000; do
    for mode in irq preempt; do
        one events $mode $us
        one tracer $mode $us
        one tracer-all $mode $us
        # Its timer comes in with preemption off, too.
        [ $mode = preempt ] || one ticks $mode $us
    done
done
echo "@ end"
