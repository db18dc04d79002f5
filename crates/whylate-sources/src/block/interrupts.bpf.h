/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Interrupts of devices, and the softirq in which the block layer ends requests that they tell of. */
#pragma once

enum {
	/* include/linux/interrupt.h */
	BLOCK_SOFTIRQ = 4,
};

/* What a CPU is at: an interrupt of a device since when, and since when the softirq that ends requests is wanted. */
struct at_interrupt {
	u64 since_ns;
	u64 softirq_wanted_ns;
	/* Of the softirq that it is at: since when it was wanted. */
	u64 told_ns;
	/* Whose stack that softirq is on; 0: none. With PREEMPT_RT another thread may have the CPU meanwhile. */
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

/* By the device's interrupt, or by one that another CPU sends on behalf of it. */
SEC("?tp_btf/softirq_raise")
int BPF_PROG(on_softirq_raise, unsigned int number)
{
	struct at_interrupt *at;

	if (number != BLOCK_SOFTIRQ)
		return 0;
	at = own_interrupt();
	if (at && !at->softirq_wanted_ns)
		at->softirq_wanted_ns = at->since_ns ? at->since_ns : bpf_ktime_get_ns();
	return 0;
}

/* Until then it is wanted, and threads may run: the softirq may be ksoftirqd's. */
SEC("?tp_btf/softirq_entry")
int BPF_PROG(on_softirq_entry, unsigned int number)
{
	struct at_interrupt *at = own_interrupt();

	if (!at)
		return 0;
	at->softirq_task = bpf_get_current_task();
	if (number == BLOCK_SOFTIRQ) {
		/* More may be told while it runs, for its next turn. */
		at->told_ns = at->softirq_wanted_ns;
		at->softirq_wanted_ns = 0;
	}
	return 0;
}

SEC("?tp_btf/softirq_exit")
int BPF_PROG(on_softirq_exit)
{
	struct at_interrupt *at = own_interrupt();

	if (at) {
		at->softirq_task = 0;
		at->told_ns = 0;
	}
	return 0;
}
