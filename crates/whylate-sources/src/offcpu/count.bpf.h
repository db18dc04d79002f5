/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Adds time to places. If switches are traced, CPUs and the walk do so concurrently. */
#pragma once

static __always_inline void add(u32 place, u64 ns, u32 samples, u32 waits)
{
	struct place_sum *sum = bpf_map_lookup_elem(&sum_by_place, &place);

	if (!sum)
		return;
	if (!traces) {
		sum->ns += ns;
		sum->samples += samples;
		sum->waits += waits;
		return;
	}
	__sync_fetch_and_add(&sum->ns, ns);
	__sync_fetch_and_add(&sum->samples, samples);
	if (waits)
		__sync_fetch_and_add(&sum->waits, waits);
}

/* Takes the time since `counted_ns`, which only grows. Returns 0 if another CPU has concurrently moved it past `now_ns`. */
static __always_inline u64 take_time(struct thread_record *record, u64 now_ns)
{
	if (!traces) {
		u64 ns = now_ns - record->counted_ns;

		record->counted_ns = now_ns;
		return ns;
	}
	for (u32 tries = 0; tries < 4; tries++) {
		u64 from_ns = *(volatile u64 *)&record->counted_ns;

		if (now_ns <= from_ns)
			return 0;
		if (__sync_val_compare_and_swap(&record->counted_ns, from_ns, now_ns) == from_ns)
			return now_ns - from_ns;
	}
	/* Taken the next time. */
	return 0;
}

/* Makes the place for the part of a wait in which the thread was runnable without a CPU. */
static __always_inline void remember_ready_place(u32 place, const struct place_key *key)
{
	struct place_sum *sum = bpf_map_lookup_elem(&sum_by_place, &place);
	struct place_key ready = *key;
	u32 ready_place;

	if (!sum || sum->ready_place || key->state == STATE_ON_CPU || key->state == STATE_READY || key->state == STATE_THROTTLED)
		return;
	ready.state = STATE_READY;
	ready_place = number_of_place(&ready);
	if (ready_place == PLACES)
		lose(LOST_PLACES);
	else
		sum->ready_place = ready_place + 1;
}

/* The place of a wait with a known waker; PLACES if there is no room. */
static __always_inline u32 place_of_wait(u32 place, u32 waker)
{
	struct wait_key key = { .place = place, .waker = waker };
	u32 *known = bpf_map_lookup_elem(&place_by_wait, &key);

	if (known)
		return *known;
	place = __sync_fetch_and_add(&places, 1);
	if (place >= most_places)
		return PLACES;
	if (!bpf_map_update_elem(&place_by_wait, &key, &place, BPF_NOEXIST))
		return place;
	/* Another CPU was faster, or there is no room. */
	known = bpf_map_lookup_elem(&place_by_wait, &key);
	return known ? *known : PLACES;
}

/* Adds the blocked part of a wait. A wait that goes on has no waker yet, and is counted at the place itself. */
static __always_inline void add_wait(struct thread_record *record, u64 ns, bool has_ended)
{
	u32 place = record->place, waker = WAKER_UNSEEN;

	if (!records_wakers || !has_ended || record->state == STATE_READY || record->state == STATE_THROTTLED) {
		add(place, ns, 1, has_ended);
		return;
	}
	if (record->waker_generation == generation + 1)
		waker = record->waker;
	if (waker == WAKER_UNSEEN)
		lose(LOST_WAKERS);
	place = place_of_wait(place, waker);
	if (place == PLACES)
		lose(LOST_PLACES);
	else
		add(place, ns, 1, 1);
}

/*
 * Counts a wait: blocked time at its place until the wakeup, run-queue wait from then on. Until the thread is switched in,
 * sched_info.last_queued holds the time of the wakeup, on the run queue's clock.
 */
static __always_inline void count_wait(struct task_struct *task, struct thread_record *record, u64 now_ns, bool has_ended)
{
	u64 ns = take_time(record, now_ns), ready_ns = 0;
	u32 place = record->place;
	struct place_sum *sum;

	if (record->state != STATE_READY && record->state != STATE_THROTTLED) {
		ready_ns = task_waiting_ns(task);
		if (ready_ns > ns)
			ready_ns = ns;
	}
	if (wanted_states & 1u << (record->state & 31))
		add_wait(record, ns - ready_ns, has_ended);
	if (!ready_ns || !(wanted_states & 1u << STATE_READY))
		return;
	sum = bpf_map_lookup_elem(&sum_by_place, &place);
	if (sum && sum->ready_place)
		add(sum->ready_place - 1, ready_ns, 1, 0);
}

static __always_inline void add_on_cpu(struct thread_record *record, u64 ns)
{
	if (record->on_cpu_place && record->on_cpu_generation == generation + 1 && (wanted_states & 1u << STATE_ON_CPU))
		add(record->on_cpu_place - 1, ns, 1, 0);
}

static __always_inline void count_on_cpu(struct thread_record *record, u64 now_ns)
{
	add_on_cpu(record, take_time(record, now_ns));
}

/* Some switches run no program. For a thread that is on a CPU after one, sched_info.last_arrival holds its switch-in. */
static __always_inline void count_unseen_run(struct task_struct *task, struct thread_record *record, u64 now_ns)
{
	u64 ns = take_time(record, now_ns), ran_ns = task_ran_ns(task);

	if (!ran_ns) {
		lose(LOST_UNSEEN);
		return;
	}
	if (ran_ns > ns)
		ran_ns = ns;
	if (wanted_states & 1u << (record->state & 31))
		add_wait(record, ns - ran_ns, true);
	add_on_cpu(record, ran_ns);
}

/* Counts the time since the last counted switch of a thread. */
static __always_inline void count_traced(struct task_struct *task, struct thread_record *record, u64 now_ns)
{
	if (record->state == STATE_ON_CPU)
		count_on_cpu(record, now_ns);
	else
		count_wait(task, record, now_ns, false);
}
