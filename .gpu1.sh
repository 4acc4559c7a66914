mkdir -p $OUT
timeout 170 python3 -m pytest -q -x --maxfail=8 -m gpu tests/conformance/test_grouped.py -p no:cacheprovider > $OUT/pytest.log 2>&1; tail -25 $OUT/pytest.log | cut -c1-400
date
