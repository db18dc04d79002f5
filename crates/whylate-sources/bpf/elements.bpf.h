/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Elements of an array that programs allocate and user space frees (`src/elements.rs`): series found by a key, pages of
 * buckets. The first word of a free element is the index of the next free one, so the free list needs no memory of its
 * own. Element 0 holds the list's head and is never allocated. Nothing here takes a lock.
 *
 * A program that creates a series writes its key and its names, inserts its index into a hash map, and only then sets its
 * first word to ELEMENT_COUNTS. A program that finds an index in the hash map compares the key in the element: the hash
 * map reuses the memory of a deleted entry at once. User space deletes the entry, clears the key, waits for the end of
 * every program that may have found it before, takes the last counts, and frees it.
 */
#pragma once

enum {
	/* A failed attempt means that another CPU, or user space, changed the list concurrently. */
	ELEMENT_ATTEMPTS = 16,
};

/* The first word of an element that user space reads. */
#define ELEMENT_COUNTS (~0ull)

/* At the start of element 0. */
struct element_list {
	/*
	 * The lower half is the index of the first free element, 0 if there is none. Each change increments the upper half, so
	 * that a compare-and-exchange fails if the same element was allocated and freed in between.
	 */
	u64 head;
	/* Number of elements that have been allocated at least once. */
	u32 used;
	/* Number of elements in use. */
	u32 in_use;
};

static __always_inline u64 list_head(u64 before, u32 first)
{
	return ((before >> 32) + 1) << 32 | first;
}

/* Allocates a free element and clears its first word; 0 if there is none. `limit` is the length of the array, or less. */
static __always_inline u32 take_element(void *array, u32 limit)
{
	struct element_list *list;
	u32 index = 0;
	u64 *link;

	list = bpf_map_lookup_elem(array, &index);
	if (!list)
		return 0;
	for (u32 attempt = 0; attempt < ELEMENT_ATTEMPTS; attempt++) {
		u64 head = *(volatile u64 *)&list->head;

		index = head;
		if (!index)
			break;
		link = bpf_map_lookup_elem(array, &index);
		if (!link)
			return 0;
		if (__sync_val_compare_and_swap(&list->head, head, list_head(head, *(volatile u64 *)link)) != head)
			continue;
		*link = 0;
		__sync_fetch_and_add(&list->in_use, 1);
		return index;
	}
	if (index || *(volatile u32 *)&list->used + 1 >= limit)
		return 0;
	index = __sync_fetch_and_add(&list->used, 1) + 1;
	if (index >= limit)
		return 0;
	__sync_fetch_and_add(&list->in_use, 1);
	return index;
}

/* Frees an element that no other program and not user space has seen. */
static __always_inline void return_element(void *array, u32 index)
{
	struct element_list *list;
	u32 zero = 0;
	u64 *link;

	list = bpf_map_lookup_elem(array, &zero);
	link = bpf_map_lookup_elem(array, &index);
	if (!list || !link)
		return;
	for (u32 attempt = 0; attempt < ELEMENT_ATTEMPTS; attempt++) {
		u64 head = *(volatile u64 *)&list->head;

		*(volatile u64 *)link = (u32)head;
		if (__sync_val_compare_and_swap(&list->head, head, list_head(head, index)) == head) {
			__sync_fetch_and_sub(&list->in_use, 1);
			return;
		}
	}
}
