# The names of the tests that failed, from what test programs printed. Of a failed program the last list counts: what a
# test printed itself may hold lists as well.
/^failures:$/ { delete listed; next }
/^    [A-Za-z0-9_:]+$/ { listed[$1] }
/^test result: FAILED/ { for (name in listed) failed[name]; delete listed }
END { for (name in failed) print name }
