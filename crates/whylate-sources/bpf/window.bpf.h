/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Copies a window of the account of this CPU into a late event. */
#pragma once

#include "occupancy.bpf.h"
#include "steal.bpf.h"

enum {
	EXPLAIN_STEP_NS = 1000000000 / EXPLAIN_STEPS,
	EXPLAIN_BURST_NS = 1000000000,
};

struct unexplained unexplained_events = {};

static __noinline void leave_unexplained(u64 late_ns, bool has_room)
{
	if (has_room)
		__sync_fetch_and_add(&unexplained_events.over_budget, 1);
	else
		__sync_fetch_and_add(&unexplained_events.no_room, 1);
	__sync_fetch_and_add(&unexplained_events.late_ns, late_ns);
}

/* With many late events, explaining each would delay others: run queues are locked during it. */
static __always_inline bool has_budget(u64 now_ns)
{
	struct account *account = account_of(bpf_get_smp_processor_id());

	return !account || account->explained_until_ns <= now_ns + EXPLAIN_BURST_NS;
}

static __always_inline void take_from_budget(struct account *account, u32 steps, u64 now_ns)
{
	if (account->explained_until_ns < now_ns)
		account->explained_until_ns = now_ns;
	account->explained_until_ns += (u64)(EXPLAIN_EVENT_STEPS + steps) * EXPLAIN_STEP_NS;
}

/* Called before evidence of a late event is collected. Counts the event if it may not be explained. */
static __always_inline bool may_explain(void *ring, u64 record_bytes, u64 late_ns, u64 now_ns)
{
	u64 room = bpf_ringbuf_query(ring, BPF_RB_RING_SIZE) - bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA);
	/* Each record has a header. */
	bool has_room = room >= record_bytes + BPF_RINGBUF_HDR_SZ;

	if (has_room && has_budget(now_ns))
		return true;
	leave_unexplained(late_ns, has_room);
	return false;
}

/* Sends the record of a late event. The room may be taken by now. */
static __always_inline void send_explained(void *ring, void *record, u64 bytes, u64 late_ns)
{
	if (bpf_ringbuf_output(ring, record, bytes, 0))
		leave_unexplained(late_ns, false);
}

/* State of a walk back through the account. */
struct walk {
	u64 from_ns;
	u64 end_ns;
	u32 cpu;
	u32 next;
	/* Intervals left until the oldest one. */
	u32 left;
};

/* Whether `handler` identifies the occupant. That of an interrupt holds its lateness. */
static __always_inline bool is_identified_by_handler(u32 kind)
{
	return kind == OCCUPANT_THREAD || kind == OCCUPANT_WORK;
}

/* `before_ns` of the interval was before the window, and up to as much of its steal time. */
static __always_inline void merge_part(struct window *window, const struct interval *interval, u64 ns, u64 before_ns)
{
	u32 home = (u32)(interval->handler >> 4) + interval->id * 7 + interval->kind;

	for (u32 probe = 0; probe < MERGED_PROBES; probe++) {
		struct merged_part *part = &window->merged[(home + probe) % MERGED_PARTS];

		if (!part->ns) {
			part->handler = is_identified_by_handler(interval->kind) ? interval->handler : 0;
			part->id = interval->id;
			part->kind = interval->kind;
			part->steal_ns = 0;
			part->nmi_ns = 0;
			__builtin_memcpy(part->name, interval->name, sizeof(part->name));
		} else if (part->id != interval->id || part->kind != interval->kind ||
			   (is_identified_by_handler(part->kind) && part->handler != interval->handler)) {
			continue;
		}
		part->ns += ns;
		part->steal_ns += since(interval->steal_ns, before_ns);
		part->nmi_ns += interval->nmi_ns;
		return;
	}
}

struct walk_with_window {
	struct window *window;
	struct walk walk;
};

/* One step back in time; 1 at the end. Global, so that the verifier verifies one step only. */
__noinline int step_back(struct window *window, struct walk *walk)
{
	const struct interval *interval;
	const struct account *account;
	u64 start_ns;
	u32 count;

	if (!window || !walk)
		return 1;
	account = account_of(walk->cpu);
	if (!account)
		return 1;
	count = window->count;
	if (!walk->left)
		return 1;
	walk->left--;
	walk->next--;
	interval = interval_at(account, walk->cpu, walk->next);
	if (!interval)
		return 1;
	start_ns = interval->start_ns;
	if (count < WINDOW_INTERVALS) {
		__builtin_memcpy(&window->intervals[count], interval, sizeof(*interval));
		window->count = count + 1;
	} else {
		if (!window->merged_end_ns)
			window->merged_end_ns = walk->end_ns;
		if (start_ns < walk->from_ns)
			start_ns = walk->from_ns;
		merge_part(window, interval, since(walk->end_ns, start_ns), start_ns - interval->start_ns);
		window->merged_start_ns = start_ns;
	}
	window->since_ns = start_ns;
	walk->end_ns = interval->start_ns;
	return interval->start_ns <= walk->from_ns;
}

static long copy_interval(u64 step, struct walk_with_window *walk)
{
	return step_back(walk->window, &walk->walk) != 0;
}

/*
 * Copies the history of this CPU since `from_ns`. Programs of the account that interrupt this must not change it: they
 * find the account busy.
 */
static __noinline u32 copy_window(struct window *window, u64 from_ns, u64 now_ns)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account = account_of(cpu);
	struct walk_with_window back = { .window = window, .walk = { .from_ns = from_ns, .cpu = cpu } };
	struct walk *walk = &back.walk;
	u64 steal_ns = account ? exact_steal_ns(account->steal_clock) : 0;
	u32 was_busy, steps;

	window->is_steal_exact = steal_ns != 0;
	window->cpu = cpu;
	window->count = 0;
	window->since_ns = now_ns;
	window->end_ns = now_ns;
	window->merged_start_ns = 0;
	window->merged_end_ns = 0;
	for (u32 part = 0; part < MERGED_PARTS; part++)
		window->merged[part].ns = 0;
	if (!account || !account->since_ns)
		return 0;
	hold_cpu();
	was_busy = account->is_busy;
	account->is_busy = true;
	barrier();
	describe(&window->intervals[0], account);
	window->intervals[0].steal_ns = since(steal_ns, account->steal_seen_ns);
	if (account->missed_switch ||
	    (is_identified_by_handler(window->intervals[0].kind) && account->tid != (u32)bpf_get_current_pid_tgid()))
		window->intervals[0].kind = OCCUPANT_NOBODY;
	window->since_ns = account->since_ns;
	window->count = 1;
	walk->end_ns = account->since_ns;
	walk->next = account->written;
	walk->left = account->written < INTERVALS ? account->written : INTERVALS;
	steps = walk->left;
	if (account->since_ns > from_ns)
		bpf_loop(INTERVALS, copy_interval, &back, 0);
	barrier();
	take_from_budget(account, steps - walk->left, now_ns);
	account->is_busy = was_busy;
	let_cpu_go();
	return window->count;
}
