/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Device interrupts, and the softirq in which the block layer completes the requests that they signal. */
#pragma once

enum {
	/* include/linux/interrupt.h */
	BLOCK_SOFTIRQ = 4,
};

/* Interrupt context of a CPU: start of the running device interrupt, and when BLOCK_SOFTIRQ was raised; 0: none. */
struct at_interrupt {
	u64 since_ns;
	u64 softirq_raised_ns;
	/* When the running softirq was raised. */
	u64 signaled_ns;
	/* Task in the context of which the softirq runs; 0: none. With PREEMPT_RT it may be preempted by another task. */
	u64 softirq_task;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct at_interrupt);
} interrupt_of_cpu SEC(".maps");

static __always_inline struct at_interrupt *own_interrupt(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&interrupt_of_cpu, &zero);
}

static __always_inline bool is_in_softirq(const struct at_interrupt *at)
{
	return at->softirq_task && at->softirq_task == bpf_get_current_task();
}

SEC("?tp_btf/irq_handler_entry")
int BPF_PROG(on_irq_handler_entry)
{
	struct at_interrupt *at = own_interrupt();

	if (at)
		at->since_ns = bpf_ktime_get_ns();
	return 0;
}

SEC("?tp_btf/irq_handler_exit")
int BPF_PROG(on_irq_handler_exit)
{
	struct at_interrupt *at = own_interrupt();

	if (at)
		at->since_ns = 0;
	return 0;
}

/* Raised by the device's interrupt, or by an IPI of the CPU that got the device's interrupt. */
SEC("?tp_btf/softirq_raise")
int BPF_PROG(on_softirq_raise, unsigned int number)
{
	struct at_interrupt *at;

	if (number != BLOCK_SOFTIRQ)
		return 0;
	at = own_interrupt();
	if (at && !at->softirq_raised_ns)
		at->softirq_raised_ns = at->since_ns ? at->since_ns : bpf_ktime_get_ns();
	return 0;
}

/* Until here it is pending, and threads may run: the softirq may run in ksoftirqd. */
SEC("?tp_btf/softirq_entry")
int BPF_PROG(on_softirq_entry, unsigned int number)
{
	struct at_interrupt *at = own_interrupt();

	if (!at)
		return 0;
	at->softirq_task = bpf_get_current_task();
	if (number == BLOCK_SOFTIRQ) {
		/* It may be raised again while it runs. */
		at->signaled_ns = at->softirq_raised_ns;
		at->softirq_raised_ns = 0;
	}
	return 0;
}

SEC("?tp_btf/softirq_exit")
int BPF_PROG(on_softirq_exit)
{
	struct at_interrupt *at = own_interrupt();

	if (at) {
		at->softirq_task = 0;
		at->signaled_ns = 0;
	}
	return 0;
}
