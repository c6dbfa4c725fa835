"""Pictures of notebook 11: what is split is drawn to scale and said; its calculator counts."""

from test_figures import check_picture

from ddpkit.lesson import page, tensor_charts


def test_split_products_are_drawn():
    assert tensor_charts.split_products(4, 6, 8, world_size=8).png  # no whole number of pixels high
    picture = tensor_charts.split_products(6, 4, 8, world_size=3)
    check_picture(picture, *page.RANK_COLOURS[:3], page.MIXED)
    for world_size in (3, 8):
        drawn = tensor_charts.split_products(6, 4, 8, world_size).figure
        drawn.draw_without_rendering()
        texts = [text.get_window_extent() for text in drawn.texts]
        assert max(text.x1 for text in texts) < drawn.bbox.x1
        assert all(text.count_overlaps(texts) == 1 for text in texts)  # itself


def test_both_send_as_much_at_three_widths_of_tokens():
    both = tensor_charts.reduced_bytes(width=64, tokens=3 * 64)
    assert both["tensor parallel"] == both["data parallel"] == 12 * 64**2 * 2
    picture = tensor_charts.bytes_by_tokens(64, 4, [64, 256, 1024])
    check_picture(picture, page.ORANGE, page.BLUE)
    tensor, data, even = picture.figure.axes[0].lines
    assert list(data.get_ydata()) == [12 * 64**2 * 2 * 2 * 3 / 4] * 3
    assert list(tensor.get_ydata()) == [4 * n * 64 * 2 * 2 * 3 / 4 for n in (64, 256, 1024)]
    assert even.get_xdata()[0] == 192


def test_the_calculator_counts_bytes_and_seconds():
    _, picture = tensor_charts.layer_times(8, 8192, 2**15)
    assert "NVLink 4: tensor parallel 10.3 ms, data parallel 7.66 ms" in repr(picture)
    check_picture(picture, page.ORANGE, page.BLUE)
