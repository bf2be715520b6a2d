// The row max of a row whose row sum is complete, for its log-sum-exp.

// In lse an exponent errs in proportion to its distance from the row max, as scale_log2 is rounded. A row max that was kept for long may
// be far from the keys that have most of the weight: it goes to where 2^4 such keys would be, by a whole number. What rounds away there
// joins the total (Knuth's TwoSum). A row max that is hardly another stays, as lse of one key has no error then; and so do those of rows
// without keys, with a total of 0, and of rows whose total is negated.
__device__ __forceinline__ void settle(float& row_max, float& total) {
    if (!(total > 0.0f) || total >= 0.5f && total < 32.0f) return;
    const int power = (__float_as_int(total) >> 23) - 127 - 4;
    const float by = static_cast<float>(power), before = row_max;
    row_max = before + by;
    const float added = row_max - before, rest = (before - (row_max - added)) + (by - added);
    total *= __int_as_float((127 - power) << 23);
    total = fmaf(total, rest * 0.693147181f, total);
}
