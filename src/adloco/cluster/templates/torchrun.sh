torchrun --nnodes {{ nodes }} --nproc-per-node {{ gpus_per_node }} \
    --rdzv-backend c10d --rdzv-endpoint {{ first }}:{{ port }} \
    --rdzv-id {{ id }} \
{% if number is defined %}
{# The first node's name may not be known yet when its agent asks whether it is the first. #}
    --rdzv-conf is_host=$([[ {{ number }} == 0 ]] && echo true || echo false) \
{% endif %}
{# The ranks are started again, on the remaining nodes, at most three times. #}
    --max-restarts 3{% if can_wait %} --shutdown-timeout {{ grace_seconds }}{% endif %} \
    -m adloco train {{ recipe | quote }} --restart
{%- for name, value in settings %} \
    --{{ name }} {{ value | quote }}
{%- endfor %}
