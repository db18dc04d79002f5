# SPDX-License-Identifier: MIT OR Apache-2.0
#
# A threshold of 40 ms stops each tool, $1 times; its output follows a line with the numbers of the cause and of the tool. $2: rtla.
cd /tmp
cause() {
    case $1 in
    0)
        insmod /lib/modules/preemptirq_delay_test.ko test_mode=irq delay=50000 cpu_affinity=1
        rmmod preemptirq_delay_test
        ;;
    1) whylate inject hog --for 49ms --times 1 --cpu 1 --policy fifo --priority 98 ;;
    2) whylate inject softirq --for 49ms --times 1 --cpu 1 ;;
    esac >/dev/null
}
tool() {
    case $1 in
    0) exec $rtla timerlat top -k -c 1 -q -T 40000 -d 20 ;;
    1) exec $rtla timerlat top -k -c 1 -q -i 40000 -d 20 ;;
    2) exec whylate timerlat top -k -c 1 -q -T 40000 -d 20 ;;
    3) exec whylate timerlat top --backend bpf -c 1 -q -T 40000 -d 20 ;;
    esac
}
rtla=$2
for round in $(seq $1); do
    for cause in 0 1 2; do
        for tool in 0 1 2 3; do
            tool $tool >out 2>&1 &
            measuring=$!
            sleep 3
            # Tools take different times to start.
            for _ in $(seq 8); do
                kill -0 $measuring 2>/dev/null || break
                cause $cause
                sleep 1
            done
            wait $measuring || true
            echo "@ $cause $tool"
            cat out
        done
    done
done
